"""What the model is: its layers, attentions, FFNs and norms, observed in one recorded pass."""

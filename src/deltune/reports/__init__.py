"""Tables, figures and a page of outcomes."""

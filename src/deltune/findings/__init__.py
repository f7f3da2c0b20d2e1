"""What several runs say together: the papers' claims decided."""

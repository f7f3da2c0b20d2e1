"""What a tuning method is: expressions, the design space, the named methods, where they go and how much they train."""

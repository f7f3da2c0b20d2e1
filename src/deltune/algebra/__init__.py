"""Methods as values: expressions, named methods, their places on an anatomy, their counts."""

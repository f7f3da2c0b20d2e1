"""Other libraries' files in terms of the algebra."""

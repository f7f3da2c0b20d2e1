"""Forms, the f of a modification, which compute a change from activations or from a weight."""

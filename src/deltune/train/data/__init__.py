"""Reading data sets from files and from the hub, checked before training."""

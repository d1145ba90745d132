"""Programs about training runs. Nothing else in the package imports them."""

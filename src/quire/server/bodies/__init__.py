"""What clients send: one typed struct for each kind of body, and the one function that reads them."""

"""Images: where they come from, how they are split among clients, and what views are made of them."""

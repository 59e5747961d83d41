"""Images: where they come from, how they are dealt to clients, and what views are made of them."""

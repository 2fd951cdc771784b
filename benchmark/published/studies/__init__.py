"""Small studies behind single tables and figures: programs of their own, which nothing imports."""

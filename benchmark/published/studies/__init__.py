"""Small studies behind single tables and figures. Each is a program of its own."""

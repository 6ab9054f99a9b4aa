"""OpenAPI 3.1 documents of the server and of each model, and the page that shows them."""

"""The console: a page for browsers that shows the models of a server, tries them and watches them."""

"""Text to adopt a model with: books and manuals out of a fixed list of Debian packages."""

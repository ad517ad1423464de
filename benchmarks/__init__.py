"""How fast and how lean: one script a question, every figure behind a correctness gate."""

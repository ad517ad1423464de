"""Multi-query associative recall: what NSA can look up and its window branch alone cannot."""

"""How text becomes token ids: the vocabulary, special tokens, and one encoder for each kind of vocabulary."""

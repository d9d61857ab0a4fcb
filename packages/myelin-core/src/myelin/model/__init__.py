"""The model as its file describes it: header, facts, architecture, quantization, tokenizer, and what a stage needs of it."""

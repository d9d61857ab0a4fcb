"""The model as its file describes it: header, facts, architecture, types, tokenizer, and what a stage needs of it."""

"""One model, two spellings: families as tables, steps between Cerebras releases, folding of muP and LoRA.

Plans lazily; reads no tensor data.
"""

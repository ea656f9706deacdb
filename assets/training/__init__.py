"""What `assets/train_demo.py` is made of: corpus and tokenizer, model, training loop, evaluation."""

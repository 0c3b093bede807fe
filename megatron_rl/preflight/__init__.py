"""What is looked at before a run starts: rows, rewards, environments, tokenizer, critic, folders and packages."""

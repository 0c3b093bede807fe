"""What happens between the calls of an engine while one answer is generated: thoughts and their budgets, beams, values
of passages, turns, and agents."""

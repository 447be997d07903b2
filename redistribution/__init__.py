"""Who gets what: pure redistribution rules. Handles in, plan out; opens no file."""

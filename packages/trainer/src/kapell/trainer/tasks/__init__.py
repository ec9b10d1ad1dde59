"""Tasks that come with the trainer: rows in verl's format and the reward that belongs to them."""

"""What a user gets: acceptance and speed."""

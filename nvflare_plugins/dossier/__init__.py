"""What a site can show of one job: all that is known of it in one signed archive, and whether its model may leave."""

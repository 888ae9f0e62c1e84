"""What comes out of files and goes into them."""

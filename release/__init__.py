"""What is published: wheels for every platform, the pure wheel and the source distribution."""

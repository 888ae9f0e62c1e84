"""What a set encoder is: states, statistics, inputs, and the base classes of every encoder."""

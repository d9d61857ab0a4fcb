"""The kernels. They import nothing but torch, triton and numpy, so that they also run where nothing else is
installed."""

"""What listens to the signals on behalf of other software. Each needs its extra, and is an app."""

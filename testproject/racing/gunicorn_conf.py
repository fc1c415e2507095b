"""What ``race`` asks of gunicorn beside the number of workers and threads."""

from __future__ import annotations

worker_class = "gthread"
# Django is imported once and the workers are forked from it, as many sites do.
preload_app = True
graceful_timeout = 1
loglevel = "warning"
# Newer versions listen on a socket in the home directory for their control program.
control_socket_disable = True

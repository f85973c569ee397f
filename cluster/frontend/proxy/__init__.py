"""What Serve's proxies lack: limits from the socket on, before any key is read; and answers that
wait until they can take them."""

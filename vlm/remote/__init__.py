"""A server that answers in this process's place: questions as its API takes them, and its answers.

Front door: `remote_server.RemoteServer`.
"""

"""Anthropic's Messages API over the same chats, tools and images.

Front door: `message_routes.router`.
"""

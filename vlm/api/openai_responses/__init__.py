"""OpenAI's Responses API over the same chats, tools and images; answers are kept in memory for a while.

Front door: `response_routes.router`.
"""

"""An OpenAI-compatible server for one model: requests, the generation thread, routes, and a chat
page.
"""

"""What stands behind the exported Triton model, `triton_repo/model/1/model.py`: its settings, reading requests, running
them on an engine, answering, and figures.

Nothing here imports Triton: the server's modules exist only inside the server, so the model hands in what is needed.
"""

"""Where telemetry goes. Adapters: `launch/program.py` chooses them through `registry.py`; roles never import them."""

"""The one function of vLLM that SGLang asks for on the CPU, for an environment that has no vLLM."""

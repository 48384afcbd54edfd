"""Megatron-Bridge and NeMo: configs and recipes whose parts are fields of Megatron-Core."""

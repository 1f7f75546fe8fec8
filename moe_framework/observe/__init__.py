"""What a run shows and records: progress, metrics, TensorBoard, throughput and the health of its routers."""

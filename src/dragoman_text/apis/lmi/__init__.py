"""The API of LMI (DJL Serving) containers, and the contract of SageMaker."""

"""Files and batches for every model: `/v1/files`, `/v1/batches`, `/v1/messages/batches`, and `dragoman batch`."""

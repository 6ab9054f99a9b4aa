"""Scientific models with exact derivatives, one per folder: `dragoman serve examples/scientific`."""

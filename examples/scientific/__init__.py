"""Scientific models with exact derivatives, one a folder: `dragoman serve examples/scientific`."""

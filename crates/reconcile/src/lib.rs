//! (see the crate map in the README)

//! Training losses, one file per algorithm; those of routers, where a drafter has experts, beside them.

pub mod dspark;
pub mod eagle3;
pub mod router;

//! The recipes inside the program: those of the folder `recipes/`, under their path without `.toml`.

use super::Recipe;
use super::keys::edits;
use crate::error::{Error, Result};

/// Name and text of each.
pub(super) const BUILT_IN: &[(&str, &str)] = &[
    ("quickstart", include_str!("../../../recipes/quickstart.toml")),
    ("dspark/smollm2_135m", include_str!("../../../recipes/dspark/smollm2_135m.toml")),
    ("dspark/qwen3_4b", include_str!("../../../recipes/dspark/qwen3_4b.toml")),
    ("dspark/qwen3_8b", include_str!("../../../recipes/dspark/qwen3_8b.toml")),
    ("dspark/qwen3_8b_moe", include_str!("../../../recipes/dspark/qwen3_8b_moe.toml")),
    ("dspark/qwen3_14b", include_str!("../../../recipes/dspark/qwen3_14b.toml")),
    ("dflash/smollm2_135m", include_str!("../../../recipes/dflash/smollm2_135m.toml")),
    ("dflash/qwen3_4b", include_str!("../../../recipes/dflash/qwen3_4b.toml")),
    ("dflash/qwen3_8b", include_str!("../../../recipes/dflash/qwen3_8b.toml")),
    ("dflash/qwen3_14b", include_str!("../../../recipes/dflash/qwen3_14b.toml")),
    ("eagle3/smollm2_135m", include_str!("../../../recipes/eagle3/smollm2_135m.toml")),
    ("eagle3/qwen3_4b", include_str!("../../../recipes/eagle3/qwen3_4b.toml")),
    ("eagle3/qwen3_8b", include_str!("../../../recipes/eagle3/qwen3_8b.toml")),
    ("eagle3/qwen3_14b", include_str!("../../../recipes/eagle3/qwen3_14b.toml")),
];

impl Recipe {
    /// Names of the recipes inside the program.
    pub fn built_in_names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// A recipe inside the program; `None` if there is none of that name.
    pub fn built_in(name: &str) -> Option<Result<Self>> {
        Self::built_in_text(name).map(|text| Self::from_toml(text, &format!("`{name}` (built-in)")))
    }

    /// Its text with comments, to start one's own from.
    pub fn built_in_text(name: &str) -> Option<&'static str> {
        BUILT_IN.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
    }
}

/// The error for a recipe that is neither a file nor built in.
pub(super) fn unknown(name: &str) -> Error {
    let names: Vec<&str> = Recipe::built_in_names().collect();
    let nearest = names.iter().min_by_key(|known| edits(name, known)).unwrap_or(&"");
    Error::Recipe {
        origin: format!("`{name}`"),
        problem: format!(
            "neither a file nor a built-in recipe; nearest: `{nearest}`, built in are `{}`",
            names.join("`, `")
        ),
    }
}

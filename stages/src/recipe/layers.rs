//! Which target layers a drafter reads: a list, or a rule that spreads them over the depth of the target.
//!
//! An id is the number of a decoder layer whose output is read; −1 is the output of the embedding. The last layer's
//! output is never a feature, since it is what the output head turns into logits.

use std::fmt;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Result};

/// Layers that `auto` picks, where the target has as many.
pub const AUTO_LAYER_COUNT: usize = 5;

/// Spelling of the rule.
const AUTO: &str = "auto";

/// Value of `draft.target_layer_ids`: the string `auto` or a list of ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetLayers {
    /// [`auto_layers`] of [`AUTO_LAYER_COUNT`], or of all ids there are in a target with fewer layers.
    Auto,
    /// These, in this order.
    Ids(Vec<i32>),
}

impl TargetLayers {
    /// The ids for a target of `num_target_layers` layers.
    ///
    /// # Errors
    /// An id is out of range for the target or given twice, or there are none.
    pub fn resolve(&self, num_target_layers: usize) -> Result<Vec<i32>> {
        match self {
            Self::Auto => auto_layers(AUTO_LAYER_COUNT.min(num_target_layers), num_target_layers),
            Self::Ids(ids) => {
                let last = last_feature(num_target_layers);
                check_ids(ids, last).map_err(|allowed| {
                    problem(&format!("{ids:?}"), &format!("{allowed} in a target of {num_target_layers} layers"))
                })?;
                Ok(ids.clone())
            }
        }
    }
}

/// Checks that ids are distinct and from −1 to `last`; the error says what is allowed.
pub(super) fn check_ids(ids: &[i32], last: i32) -> Result<(), String> {
    let mut unique = ids.to_vec();
    unique.sort_unstable();
    unique.dedup();
    let fits = !ids.is_empty() && unique.len() == ids.len() && ids.iter().all(|id| (-1..=last).contains(id));
    if fits {
        return Ok(());
    }
    let upper = if last == i32::MAX { "the last layer but one".to_owned() } else { last.to_string() };
    Err(format!("at least one id, each once, from -1 (embedding) to {upper}"))
}

/// Spreads `count` ids evenly from layer 1 to the third layer from the end, rounded to whole layers; one id alone lies
/// in the middle. Where that range is too short for distinct ids it is widened by one layer at a time: up to the last
/// layer but one, then down to the embedding. For 36 layers and 5 ids this gives 1, 9, 17, 25, 33.
///
/// # Errors
/// `count` is 0 or more than there are ids in a target of `num_target_layers` layers.
pub fn auto_layers(count: usize, num_target_layers: usize) -> Result<Vec<i32>> {
    if count == 0 || count > num_target_layers {
        let allowed = format!("1 to {num_target_layers} ids in a target of {num_target_layers} layers");
        return Err(problem(&format!("the spread of {count} layers"), &allowed));
    }
    let last = last_feature(num_target_layers);
    let (mut low, mut high) = (1, (last - 1).max(1).min(last.max(-1)));
    low = low.min(high);
    let wanted = i32::try_from(count).unwrap_or(i32::MAX);
    while high - low + 1 < wanted {
        if high < last { high += 1 } else { low -= 1 }
    }
    let spread = |index: usize| {
        let share = if count == 1 { 0.5 } else { index as f64 / (count - 1) as f64 };
        (f64::from(low) + share * f64::from(high - low)).round() as i32
    };
    Ok((0..count).map(spread).collect())
}

/// The last layer whose output may be a feature; −1 is the embedding.
fn last_feature(num_target_layers: usize) -> i32 {
    i32::try_from(num_target_layers).map_or(i32::MAX - 1, |layers| layers - 2)
}

fn problem(found: &str, allowed: &str) -> Error {
    Error::Recipe {
        origin: "and target do not fit".into(),
        problem: format!("`draft.target_layer_ids` is {found}, allowed: {allowed}"),
    }
}

impl Serialize for TargetLayers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str(AUTO),
            Self::Ids(ids) => ids.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for TargetLayers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AutoOrIds)
    }
}

struct AutoOrIds;

impl<'de> Visitor<'de> for AutoOrIds {
    type Value = TargetLayers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{AUTO}\" or a list of layer numbers")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<TargetLayers, E> {
        if text == AUTO {
            Ok(TargetLayers::Auto)
        } else {
            Err(E::invalid_value(serde::de::Unexpected::Str(text), &self))
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<TargetLayers, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = list.next_element::<i64>()? {
            ids.push(i32::try_from(id).map_err(|_| A::Error::custom(format!("{id} is not the number of a layer")))?);
        }
        Ok(TargetLayers::Ids(ids))
    }
}

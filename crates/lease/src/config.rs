//! What an administrator may choose.

use std::time::Duration;

/// How long leases and cooldowns last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `--lease-cooldown`: how long a `rate_limited` report keeps a proxy from a target, and how
    /// long after its end a lease can still be reported. Zero switches both off.
    pub cooldown: Duration,
    /// `--ban-cooldown`: the same for `banned`.
    pub ban_cooldown: Duration,
    /// What a lease lasts when its request names no ttl.
    pub default_ttl: Duration,
    /// The longest ttl granted, so that a client that forgot its lease does not hold a slot
    /// forever; a longer use renews.
    pub max_ttl: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cooldown: Duration::from_secs(15 * 60),
            ban_cooldown: Duration::from_secs(15 * 60),
            default_ttl: Duration::from_secs(300),
            max_ttl: Duration::from_secs(24 * 60 * 60),
        }
    }
}

/// Cooldowns and ttls over this are refused: ten years, well inside what timestamps can hold.
const LONGEST: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// A sentence about one bad value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("the longest lease ttl is 0: give more, such as 24h")]
    ZeroMaximum,
    #[error(
        "the default lease ttl of {} s is not between 1 ms and the longest ttl of {} s",
        default.as_secs_f64(),
        maximum.as_secs_f64()
    )]
    DefaultTtl {
        default: Duration,
        maximum: Duration,
    },
    #[error("the {what} of {} s is over ten years", value.as_secs())]
    TooLong { what: &'static str, value: Duration },
    #[error(
        "the ban cooldown of {} s is shorter than the lease cooldown of {} s: a ban is the \
         stronger verdict, give it at least as long",
        ban.as_secs(),
        cooldown.as_secs()
    )]
    BanShorter { ban: Duration, cooldown: Duration },
}

impl Config {
    /// Every fault, not only the first.
    pub fn faults(&self) -> Vec<ConfigError> {
        let mut faults = Vec::new();
        if self.max_ttl.as_millis() == 0 {
            faults.push(ConfigError::ZeroMaximum);
        } else if self.default_ttl.as_millis() == 0 || self.default_ttl > self.max_ttl {
            faults.push(ConfigError::DefaultTtl {
                default: self.default_ttl,
                maximum: self.max_ttl,
            });
        }
        for (what, value) in [
            ("lease cooldown", self.cooldown),
            ("ban cooldown", self.ban_cooldown),
            ("longest lease ttl", self.max_ttl),
        ] {
            if value > LONGEST {
                faults.push(ConfigError::TooLong { what, value });
            }
        }
        if self.ban_cooldown < self.cooldown {
            faults.push(ConfigError::BanShorter {
                ban: self.ban_cooldown,
                cooldown: self.cooldown,
            });
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_sound_and_each_fault_is_told() {
        assert_eq!(Config::default().faults(), []);
        let bad = Config {
            cooldown: Duration::from_secs(60),
            ban_cooldown: Duration::from_secs(59),
            default_ttl: Duration::from_secs(11),
            max_ttl: Duration::from_secs(10),
        };
        let told: Vec<_> = bad.faults().iter().map(ToString::to_string).collect();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].contains("11 s"), "{told:?}");
        assert!(told[1].contains("59 s"), "{told:?}");
    }
}

// The games: how each is reset, where its RAM holds the score and the lives, and when it is over.
//
// All of it was measured on ale-py 0.12.1: every byte of RAM was written with every value, and its answers noted.
#pragma once

#include <stdint.h>
#include <string.h>

#include "device.h"

namespace beast::atari {

enum Cart : uint8_t { kCart2K, kCart4K, kCartF8, kCartF8SC, kCartF6, kCartF6SC, kCartE0, kCartFE };

enum GameFlags : uint8_t {
  kPaddles = 1,
  kSwappedPorts = 2,
  kHardUntilFirstAction = 4,  // both difficulty switches at A until the first action after the ROM was loaded
  kNoHmoveBlank = 8,
  kPal = 16,
  kNoFire = 32,  // ALE takes actions with FIRE for NOOP, but for those of a reset
  // A frame may end in a later call of the emulator. An image of a vector env then lacks the rows that an earlier step
  // drew, and differs from that of ale-py.
  kHasLongFrames = 64,
};

// Which rules give reward, lives and game over. kNoRules: emulated, but always reward 0 and never over.
enum GameRules : uint8_t {
  kNoRules, kAdventure, kAirRaid, kAlien, kAmidar, kAssault, kAsterix, kAsteroids, kAtlantis, kAtlantis2, kBackgammon,
  kBankHeist, kBasicMath, kBattleZone, kBeamRider, kBerzerk, kBlackjack, kBowling, kBoxing, kBreakout, kCarnival,
  kCasino, kCentipede, kChopperCommand, kCrazyClimber, kCrossbow, kDarkchambers, kDefender, kDemonAttack, kDonkeyKong,
  kDoubleDunk, kEarthworld, kElevatorAction, kEnduro, kEntombed, kEt, kFishingDerby, kFlagCapture, kFreeway, kFrogger,
  kFrostbite, kGalaxian, kGopher, kGravitar, kHangman, kHauntedHouse, kHero, kHumanCannonball, kIceHockey, kJamesbond,
  kJourneyEscape, kKaboom, kKangaroo, kKeystoneKapers, kKingKong, kKlax, kKoolaid, kKrull, kKungFuMaster, kLaserGates,
  kLostLuggage, kMarioBros, kMiniatureGolf, kMontezumaRevenge, kMrDo, kMsPacman, kNameThisGame, kOthello, kPacman,
  kPhoenix, kPitfall, kPong, kPooyan, kPrivateEye, kQbert, kRiverraid, kRoadRunner, kRobotank, kSeaquest,
  kSirLancelot, kSkiing, kSolaris, kSpaceInvaders, kSpaceWar, kStarGunner, kSuperman, kSurround, kTennis, kTetris,
  kTicTacToe3d, kTimePilot, kTrondead, kTurmoil, kTutankham, kUpNDown, kVenture, kVideoCheckers, kVideoChess,
  kVideoCube, kVideoPinball, kWizardOfWor, kWordZapper, kYarsRevenge, kZaxxon,
};

// While RAM[address] != value, or RAM[other_address] != other_value where there is another, hold SELECT for `frames`
// frames and release it for one. `once` > 0: first once for that many frames, whatever RAM says. frames == 0: RAM is not
// looked at.
struct ModeScript {
  uint8_t frames;
  uint8_t address;
  uint8_t value;
  uint8_t once;
  uint8_t other_address = 0;
  uint8_t other_value = 0;
};

// What a reset does last: nothing for `wait` frames, then the action, then nothing for `rest` frames.
struct StartAction {
  uint8_t action;
  uint8_t frames;
  uint16_t wait = 0;
  uint8_t rest = 0;
};

struct Game {
  const char* name;
  const char* md5;
  GameRules rules;
  Cart cart;
  uint8_t first_line;  // the scan line of the screen's first row
  uint8_t height;      // rows
  uint8_t flags;
  uint32_t actions;      // bit i: action i is in the minimal set
  uint8_t reset_frames;  // in which a reset holds RESET, but for Double Dunk's menu
  ModeScript script;
  StartAction start;
  uint8_t lives;  // right after a reset

  HD bool has(GameFlags flag) const { return flags & flag; }
  // Whether environments equal those of ale-py. An on-demand test of tests/test_atari_env.py compares two of each of
  // these games over 500 random steps in each protocol. Games without rules or with long frames are not among them.
  bool is_exact() const { return rules != kNoRules && !has(kHasLongFrames); }
};

// clang-format off
constexpr Game kGames[] = {
    // name, md5, rules, cart, first_line, height, flags, actions, reset_frames,
    //     script {frames, address, value, once, other_address, other_value}, start {action, frames, wait, rest}, lives
    {"adventure", "4b27f5397c442d25f0c418ccdacf1926", kAdventure, kCart4K, 34, 250, kPal, 0x3FFFF, 12, {}, {0, 0}, 1},
    {"air_raid", "35be55426c1fec32dfb503b4f0651572", kAirRaid, kCart4K, 34, 250, kPal, 0x0181B, 12, {10, 0xAA, 0x01, 20}, {1, 1}, 1},
    {"alien", "f1a0a23e6464d954e3a9579c4ccd01c8", kAlien, kCart4K, 34, 210, 0, 0x3FFFF, 12, {2, 0x81, 0x00, 0}, {0, 0}, 3},
    {"amidar", "acb7750b4d0c4bd34969802a7deb2990", kAmidar, kCart4K, 34, 210, kHardUntilFirstAction, 0x03C3F, 8, {}, {0, 0}, 0},
    {"assault", "de78b3a064d374390ac0710f95edde92", kAssault, kCart4K, 34, 210, 0, 0x0181F, 8, {}, {0, 0}, 4},
    {"asterix", "89a68746eff7f266bbf08de2483abe55", kAsterix, kCartF8, 34, 210, 0, 0x003FD, 8, {}, {1, 1}, 3},
    {"asteroids", "ccbd36746ed4525821a8083b0d6d2c2c", kAsteroids, kCartF8, 34, 210, kNoHmoveBlank, 0x0FCFF, 12, {}, {0, 0}, 4},
    {"atlantis", "9ad36e699ef6f45d9eb6c4cf90475c9f", kAtlantis, kCart4K, 34, 210, 0, 0x01803, 12, {2, 0x8D, 0x00, 0}, {0, 0}, 6},
    {"atlantis2", "826481f6fc53ea47c9f272f7050eedf7", kAtlantis2, kCart4K, 34, 210, 0, 0x01803, 8, {}, {0, 0}, 6},
    {"backgammon", "8556b42aa05f94bc29ff39c39b11bff4", kBackgammon, kCart4K, 34, 210, kPaddles, 0x0001A, 12, {1, 0xDC, 0x03, 0}, {0, 0}, 1},
    {"bank_heist", "00ce0bdd43aed84a983bef38fe7f5ee3", kBankHeist, kCart4K, 34, 210, 0, 0x3FFFF, 12, {2, 0x80, 0x00, 0}, {0, 0}, 4},
    {"basic_math", "819aeeb9a2e11deb54e6de334f843894", kBasicMath, kCart2K, 34, 210, 0, 0x0003F, 12, {2, 0xC5, 0x05, 0}, {0, 0}, 1},
    {"battle_zone", "41f252a66c6301f1e8ab3612c19bc5d4", kBattleZone, kCartF8, 34, 210, kNoHmoveBlank, 0x3FFFF, 12, {2, 0xA1, 0x01, 0}, {0, 0}, 5},
    {"beam_rider", "79ab4123a83dc11d468fb2108ea09e2e", kBeamRider, kCartF8, 34, 210, 0, 0x018DF, 8, {}, {3, 1}, 3},
    {"berzerk", "136f75c4dd02c29283752b7e5799f978", kBerzerk, kCart4K, 34, 210, 0, 0x3FFFF, 12, {2, 0x80, 0x01, 0}, {0, 0}, 3},
    {"blackjack", "0a981c03204ac2b278ba392674682560", kBlackjack, kCart2K, 34, 210, kPaddles, 0x00027, 8, {}, {0, 0}, 1},
    {"bowling", "c9b7afad3bfd922e006a6bfc1d4f3fe7", kBowling, kCart2K, 34, 210, 0, 0x02427, 12, {}, {0, 0}, 0},
    {"boxing", "c3ef5c4653212088eda54dc91d787870", kBoxing, kCart2K, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 0},
    {"breakout", "f34f08e5eb96e500e851a80be3277a56", kBreakout, kCart2K, 34, 210, kPaddles, 0x0001B, 12, {1, 0xB2, 0x00, 0}, {0, 0}, 5},
    {"carnival", "028024fb8e5e5f18ea586652f9799c96", kCarnival, kCart4K, 26, 214, 0, 0x0181B, 8, {}, {0, 0}, 0},
    {"casino", "b816296311019ab69a21cb9e9e235d12", kCasino, kCart4K, 34, 210, kPaddles, 0x00027, 12, {2, 0xD4, 0x00, 0}, {1, 2, 60, 0}, 1},
    {"centipede", "91c2098e88a6b13f977af8c003e0bca5", kCentipede, kCartF8, 34, 210, 0, 0x3FFFF, 12, {2, 0xA7, 0x16, 0}, {0, 0}, 3},
    {"chopper_command", "c1cb228470a87beb5f36e90ac745da26", kChopperCommand, kCart4K, 34, 210, 0, 0x3FFFF, 12, {2, 0xE0, 0x00, 0}, {0, 0}, 3},
    {"combat", "0ef64cdbecccb7049752a3de0b7ade14", kNoRules, kCart2K, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 0},
    {"crazy_climber", "55ef7b65066428367844342ed59f956c", kCrazyClimber, kCartF8, 34, 210, 0, 0x003FD, 12, {}, {0, 0}, 5},
    {"crossbow", "8cd26dcf249456fe4aeb8db42d49df74", kCrossbow, kCartF6, 34, 210, 0, 0x3FFFF, 12, {2, 0x8D, 0x01, 0}, {0, 0}, 1},
    {"darkchambers", "106855474c69d08c8ffa308d47337269", kDarkchambers, kCartF6SC, 34, 210, kNoHmoveBlank, 0x3FFFF, 8, {}, {0, 0, 486, 0}, 1},
    {"defender", "0f643c34e40e3f1daafd9c524d3ffe64", kDefender, kCart4K, 34, 210, 0, 0x3FFFF, 12, {2, 0x9B, 0x01, 0}, {0, 0}, 3},
    {"demon_attack", "f0e0addc07971561ab80d9abe1b8d333", kDemonAttack, kCart4K, 34, 210, 0, 0x0181B, 12, {1, 0xEA, 0x01, 0}, {0, 0}, 1},
    {"donkey_kong", "36b20c427975760cb9cf4a47e41369e4", kDonkeyKong, kCart4K, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 2},
    {"double_dunk", "368d88a6c071caba60b4f778615aae94", kDoubleDunk, kCartF6, 34, 210, 0, 0x3FFFF, 8, {0, 0, 0, 1}, {10, 1}, 0},
    {"earthworld", "5aea9974b975a6a844e6df10d2b861c4", kEarthworld, kCartF8, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 1},
    {"elevator_action", "71f8bacfbdca019113f3f0801849057e", kElevatorAction, kCartF8SC, 34, 210, 0, 0x3FFFF, 8, {}, {1, 16}, 4},
    {"enduro", "94b92a882f6dbaa6993a46e2dcc58402", kEnduro, kCart4K, 34, 210, 0, 0x01B3B, 8, {}, {1, 1}, 0},
    {"entombed", "6b683be69f92958abe0e2a9945157ad5", kEntombed, kCart4K, 34, 210, 0, 0x3FFFF, 8, {}, {1, 1, 0, 5}, 1},
    {"et", "615a3bf251a38eb6638cdc7ffbde5480", kEt, kCartF8, 34, 210, 0, 0x3FFFF, 12, {}, {0, 0}, 3},
    {"fishing_derby", "b8865f05676e64f3bec72b9defdacfa7", kFishingDerby, kCart2K, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 0},
    {"flag_capture", "30512e0e83903fc05541d2f6a6a62654", kFlagCapture, kCart2K, 34, 210, 0, 0x3FFFF, 12, {2, 0xD6, 0x08, 0}, {0, 0}, 1},
    {"freeway", "8e0ab801b1705a740b476b7f588c6d16", kFreeway, kCart2K, 34, 210, 0, 0x00025, 12, {2, 0x80, 0x00, 0}, {0, 0}, 0},
    {"frogger", "081e2c114c9c20b61acf25fc95c71bf4", kFrogger, kCart4K, 34, 210, 0, 0x0003D, 12, {2, 0xDD, 0x01, 0}, {0, 0}, 4},
    {"frostbite", "4ca73eb959299471788f0b685c3ba0b5", kFrostbite, kCart4K, 34, 210, 0, 0x3FFFF, 12, {2, 0x80, 0x00, 0}, {0, 0}, 4},
    {"galaxian", "211774f4c5739042618be8ff67351177", kGalaxian, kCartF8, 34, 210, 0, 0x0181B, 12, {1, 0xB3, 0x01, 0}, {0, 0}, 4},
    {"gopher", "c16c79aad6272baffb8aae9a7fff0864", kGopher, kCart4K, 34, 210, 0, 0x01C1F, 16, {5, 0xD3, 0x00, 0}, {1, 1}, 3},
    {"gravitar", "8ac18076d01a6b63acf6e2cab4968940", kGravitar, kCartF8, 34, 210, 0, 0x3FFFF, 12, {}, {1, 16}, 6},
    {"hangman", "f16c709df0a6c52f47ff52b9d95b7d8d", kHangman, kCart4K, 34, 210, 0, 0x3FFFF, 12, {}, {0, 0}, 1},
    {"haunted_house", "f0a6e99f5875891246c3dbecbf2d2cea", kHauntedHouse, kCart4K, 34, 210, 0, 0x3FFFF, 12, {}, {0, 0}, 9},
    {"hero", "fca4a5be1251927027f2c24774a02160", kHero, kCartF8, 34, 210, 0, 0x3FFFF, 12, {2, 0x80, 0x00, 0}, {0, 0}, 4},
    {"human_cannonball", "7972e5101fa548b952d852db24ad6060", kHumanCannonball, kCart2K, 34, 210, 0, 0x3FFFF, 12, {2, 0xB6, 0x01, 0, 0xB7, 0x01}, {0, 0}, 1},
    {"ice_hockey", "a4c08c4994eb9d24fb78be1793e82e26", kIceHockey, kCart4K, 34, 210, 0, 0x3FFFF, 12, {}, {0, 0}, 0},
    {"jamesbond", "e51030251e440cffaab1ac63438b44ae", kJamesbond, kCartE0, 34, 210, 0, 0x3FFFF, 12, {}, {0, 0}, 6},
    {"journey_escape", "718ae62c70af4e5fd8e932fee216948a", kJourneyEscape, kCart4K, 34, 230, 0, 0x3FBFD, 8, {}, {1, 1}, 0},
    {"joust", "3276c777cbe97cdd2b4a63ffc16b7151", kNoRules, kCartF8, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 0},
    {"kaboom", "5428cdfada281c569c74c7308c7f2c26", kKaboom, kCart2K, 34, 210, kPaddles, 0x0001B, 8, {}, {1, 1}, 1},
    {"kangaroo", "4326edb70ff20d0ee5ba58fa5cb09d60", kKangaroo, kCartF8, 34, 210, 0, 0x3FFFF, 12, {}, {0, 0}, 3},
    {"keystone_kapers", "6c1f3f2e359dbf55df462ccbcdd2f6bf", kKeystoneKapers, kCart4K, 34, 250, kPal, 0x03FFF, 8, {}, {0, 0}, 3},
    {"king_kong", "0dd4c69b5f9a7ae96a7a08329496779a", kKingKong, kCart4K, 34, 250, kPal, 0x0003F, 12, {}, {0, 0}, 3},
    {"klax", "eed9eaf1a0b6a2b9bc4c8032cb43e3fb", kKlax, kCartF6SC, 34, 250, kPal, 0x3FFFF, 12, {}, {1, 1, 0, 1}, 1},
    {"koolaid", "534e23210dd1993c828d944c6ac4d9fb", kKoolaid, kCart4K, 34, 210, 0, 0x003FD, 8, {}, {0, 0}, 0},
    {"krull", "4baada22435320d185c95b7dd2bcdb24", kKrull, kCartF8, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 3},
    {"kung_fu_master", "5b92a93b23523ff16e2789b820e2a4c5", kKungFuMaster, kCartF8, 34, 210, 0, 0x3FB3D, 8, {}, {0, 0}, 4},
    {"laser_gates", "8e4cd60d93fcde8065c1a2b972a26377", kLaserGates, kCart4K, 34, 250, kPal, 0x3FFFF, 8, {}, {0, 0}, 0},
    {"lost_luggage", "2d76c5d1aad506442b9e9fb67765e051", kLostLuggage, kCart4K, 34, 210, kNoFire, 0x003FD, 12, {2, 0x94, 0x01, 0}, {1, 1}, 3},
    {"mario_bros", "e908611d99890733be31733a979c62d8", kMarioBros, kCartF8, 34, 210, 0, 0x3FFFF, 12, {}, {1, 7, 10, 0}, 5},
    {"maze_craze", "ed2218b3075d15eaa34e3356025ccca3", kNoRules, kCart4K, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 0},
    {"miniature_golf", "df62a658496ac98a3aa4a6ee5719c251", kMiniatureGolf, kCart2K, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 1},
    {"montezuma_revenge", "3347a6dd59049b15a38394aa2dafa585", kMontezumaRevenge, kCartE0, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 6},
    {"mr_do", "aa7bb54d2c189a31bb1fa20099e42859", kMrDo, kCartF8, 34, 250, kPal, 0x03C3F, 12, {}, {1, 1}, 4},
    {"ms_pacman", "87e79cd41ce136fd4f72cc6e2c161bee", kMsPacman, kCartF8, 34, 210, kNoHmoveBlank, 0x003FD, 12, {}, {0, 0}, 3},
    {"name_this_game", "36306070f0c90a72461551a7a4f3a209", kNameThisGame, kCart4K, 34, 210, 0, 0x0181B, 12, {2, 0xDE, 0x08, 0}, {0, 0}, 3},
    {"othello", "113cd09c9771ac278544b7e90efe7df2", kOthello, kCart2K, 34, 210, 0, 0x003FF, 12, {2, 0xDE, 0x01, 0}, {0, 0}, 1},
    {"pacman", "fc2233fc116faef0d3c31541717ca2db", kPacman, kCart4K, 34, 250, kPal, 0x0003D, 12, {2, 0xCC, 0x01, 0, 0xE6, 0x00}, {0, 0}, 4},
    {"phoenix", "7e52a95074a66640fcfde124fffd491a", kPhoenix, kCartF8, 34, 210, 0, 0x0383B, 8, {}, {0, 0}, 5},
    {"pitfall", "3e90cf23106f2e08b2781e41299de556", kPitfall, kCart4K, 34, 210, 0, 0x3FFFF, 8, {}, {2, 1}, 3},
    {"pong", "60e0ea3cbe0913d39803477945e9e5ec", kPong, kCart2K, 34, 210, kPaddles | kSwappedPorts, 0x0181B, 12, {2, 0x96, 0x00, 0}, {0, 0}, 0},
    {"pooyan", "4799a40b6e889370b7ee55c17ba65141", kPooyan, kCart4K, 26, 220, 0, 0x02427, 12, {2, 0xBD, 0x0A, 2}, {0, 0}, 3},
    {"private_eye", "ef3a4f64b6494ba770862768caf04b86", kPrivateEye, kCartF8, 34, 210, 0, 0x3FFFF, 12, {}, {2, 1}, 0},
    {"qbert", "484b0076816a104875e00467d431c2d2", kQbert, kCart4K, 40, 210, 0, 0x0003F, 8, {}, {0, 0}, 4},
    {"riverraid", "393948436d1f4cc3192410bb918f9724", kRiverraid, kCart4K, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 4},
    {"road_runner", "ce5cc62608be2cd3ed8abd844efb8919", kRoadRunner, kCartF6, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 3},
    {"robotank", "4f618c2429138e0280969193ed6c107e", kRobotank, kCartFE, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 4},
    {"seaquest", "240bfbac5163af4df5ae713985386f92", kSeaquest, kCart4K, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 4},
    {"sir_lancelot", "dd0cbe5351551a538414fb9e37fc56e8", kSirLancelot, kCartF8, 34, 250, kPal, 0x0181B, 9, {}, {4, 1}, 3},
    {"skiing", "b76fbadc8ffb1f83e2ca08b6fb4d6c9f", kSkiing, kCart2K, 34, 210, kNoFire, 0x00019, 8, {}, {5, 16}, 0},
    {"solaris", "e72eb8d4410152bdcb69e7fba327b420", kSolaris, kCartF6, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 3},
    {"space_invaders", "72ffbef6504b75e69ee1045af9075f66", kSpaceInvaders, kCart4K, 34, 210, 0, 0x0181B, 12, {2, 0xDC, 0x00, 0}, {0, 0}, 3},
    {"space_war", "b702641d698c60bcdc922dbd8c9dd49c", kSpaceWar, kCart2K, 34, 250, kPal, 0x3FFFF, 12, {2, 0xA7, 0x06, 0}, {0, 0}, 1},
    {"star_gunner", "a3c1c70024d7aabb41381adbfb6d3b25", kStarGunner, kCart4K, 34, 210, 0, 0x3FFFF, 12, {}, {0, 0}, 5},
    {"superman", "a9531c763077464307086ec9a1fd057d", kSuperman, kCart4K, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 1},
    {"surround", "4d7517ae69f95cfbc053be01312b7dba", kSurround, kCart2K, 34, 210, kSwappedPorts, 0x0003D, 12, {2, 0xF9, 0x01, 0}, {0, 0}, 1},
    {"tennis", "42cdd6a9e42a3639e190722b8ea3fc51", kTennis, kCart2K, 34, 210, 0, 0x3FFFF, 12, {}, {0, 0}, 0},
    {"tetris", "b0e1ee07fbc73493eac5651a52f90f00", kTetris, kCart2K, 34, 210, 0, 0x0003B, 8, {}, {0, 0}, 0},
    {"tic_tac_toe_3d", "0db4f4150fecf77e4ce72ca4d04c052f", kTicTacToe3d, kCart2K, 34, 210, kHasLongFrames, 0x003FF, 12, {}, {0, 0}, 1},
    {"time_pilot", "fc2104dd2dadf9a6176c1c1c8f87ced9", kTimePilot, kCartF8, 34, 210, 0, 0x03C3F, 8, {}, {0, 0}, 5},
    {"trondead", "fb27afe896e7c928089307b32e5642ee", kTrondead, kCart4K, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 5},
    {"turmoil", "7a5463545dfb2dcfdafa6074b2f2c15e", kTurmoil, kCart4K, 34, 210, 0, 0x01BFF, 12, {}, {1, 1}, 4},
    {"tutankham", "085322bae40d904f53bdcc56df0593fc", kTutankham, kCartE0, 34, 210, 0, 0x01C3D, 12, {2, 0xAB, 0x00, 0}, {0, 0}, 3},
    {"up_n_down", "a499d720e7ee35c62424de882a3351b6", kUpNDown, kCartF8, 30, 210, 0, 0x02427, 8, {}, {1, 1}, 5},
    {"venture", "3e899eba0ca8cd2972da1ae5479b4f0d", kVenture, kCart4K, 34, 210, 0, 0x3FFFF, 8, {}, {0, 0}, 4},
    {"video_checkers", "539d26b6e9df0da8e7465f0f5ad863b7", kVideoCheckers, kCart4K, 34, 210, kHasLongFrames, 0x003C2, 12, {}, {0, 0}, 1},
    {"video_chess", "f0b7db930ca0e548c41a97160b9f6275", kVideoChess, kCart4K, 34, 210, kHasLongFrames, 0x003FF, 12, {}, {0, 0}, 1},
    {"video_cube", "3f540a30fdee0b20aed7288e4a5ea528", kVideoCube, kCart4K, 34, 210, 0, 0x3FFFF, 12, {}, {1, 1, 61, 2}, 1},
    {"video_pinball", "107cc025334211e6d29da0b6be46aec7", kVideoPinball, kCart4K, 34, 210, 0, 0x01C3F, 12, {2, 0xC1, 0x00, 0}, {0, 0}, 3},
    {"warlords", "cbe5a166550a8129a5e6d374901dffad", kNoRules, kCart4K, 34, 210, kPaddles, 0x3FFFF, 8, {}, {0, 0}, 0},
    {"wizard_of_wor", "7e8aa18bc9502eb57daaf5e7c1e94da7", kWizardOfWor, kCart4K, 34, 210, kSwappedPorts, 0x03C3F, 8, {}, {0, 0}, 3},
    {"word_zapper", "ec3beb6d8b5689e867bafb5d5f507491", kWordZapper, kCart4K, 34, 210, 0, 0x3FFFF, 12, {2, 0xDB, 0x00, 0}, {1, 1, 486, 2}, 1},
    {"yars_revenge", "c5930d0e8cdae3e037349bfa08e871be", kYarsRevenge, kCart4K, 34, 210, 0, 0x3FFFF, 12, {1, 0xE3, 0x00, 2}, {1, 1}, 4},
    {"zaxxon", "eea0da9b987d661264cce69a7c13c3bd", kZaxxon, kCartF8, 34, 210, 0, 0x3FFFF, 12, {}, {0, 0}, 5},
};
// clang-format on
constexpr int kNumGames = sizeof(kGames) / sizeof(kGames[0]);

// The row of `name` ("space_invaders"), or null.
inline const Game* find_game(const char* name) {
  for (const Game& game : kGames) {
    if (!strcmp(game.name, name)) return &game;
  }
  return nullptr;
}

// What the rules remember from frame to frame.
struct Tally {
  int32_t score;
  int32_t reward;
  int32_t points;  // Tennis: the score within a game; Miniature Golf: the strokes of a hole
  int16_t lives;
  int16_t shown_lives;  // none once the game is over, but in Adventure
  uint8_t over;
  uint8_t started;
  uint8_t previous;      // the byte whose last value a rule looks at
  uint8_t rested;        // Othello: for how many frames nobody has been to move, kMostRested at most
  uint8_t par, strokes;  // Miniature Golf, in BCD: the hole's par, and the strokes of all holes
};
constexpr int kMostRested = 51;
constexpr int kMostPoints = 1 << 20;

HD inline Tally start_tally(const Game& game) {
  Tally tally{};
  tally.lives = tally.shown_lives = game.lives;
  return tally;
}

// Two decimal digits. An invalid digit counts as what it holds, as in ALE.
HD inline int bcd(uint8_t byte) { return 10 * (byte >> 4) + (byte & 15); }
// One digit where the game shows a blank as 10.
HD inline int digit_or_blank(uint8_t byte) { return (byte & 15) == 10 ? 0 : byte & 15; }

HD inline int alien_digit(uint8_t byte) { return byte == 0x80 ? 0 : byte >> 3; }
HD inline int riverraid_digit(uint8_t byte) { return byte % 8 == 0 && byte <= 0x48 ? byte / 8 : 0; }

// One frame of a game's rules: reads RAM ($80 is ram[0]), or the cartridge's, and updates score, reward, lives and over.
HD inline void apply_rules(GameRules rules, const uint8_t* console_ram, const uint8_t* cart_ram, Tally& tally) {
  const uint8_t* ram = console_ram;
  const auto at = [&ram](int address) -> uint8_t { return ram[address & 0x7F]; };
  const auto bcd3 = [at](int high, int middle, int low) {
    return bcd(at(high)) * 10000 + bcd(at(middle)) * 100 + bcd(at(low));
  };
  const auto bcd2 = [at](int high, int low) { return bcd(at(high)) * 100 + bcd(at(low)); };
  int score = 0;
  int lives = tally.lives;
  bool over = false, keeps_lives = false;  // keeps_lives: also once the game is over
  // The reward is the score's rise, unless the game gives another.
  constexpr int kRise = INT32_MIN;
  int reward = kRise;
  const auto rise = [&] { return score - tally.score; };
  const auto rise_of_wrapped = [&](int modulus) { return rise() < 0 ? rise() + modulus : rise(); };
  const auto rise_or_0 = [&] { return rise() < 0 ? 0 : rise(); };
  switch (rules) {
    case kNoRules: return;
    case kAdventure:
      score = at(0xB9) == 0x12;  // the chalice is home
      over = at(0xE0) == 2 || score;
      keeps_lives = true;
      break;
    case kAirRaid:
      score = bcd3(0xA8, 0xA9, 0xAA);
      over = at(0xA7) == 0xFF;
      break;
    case kAlien:
      score = alien_digit(at(0x83)) * 100000 + alien_digit(at(0x85)) * 10000 + alien_digit(at(0x87)) * 1000 +
              alien_digit(at(0x89)) * 100 + alien_digit(at(0x8B)) * 10;
      lives = at(0xC0) & 15;
      over = lives == 0;
      break;
    case kAmidar:
      score = bcd3(0xDB, 0xDA, 0xD9);
      lives = at(0xD6) & 15;
      over = at(0xD6) == 0x80;
      break;
    case kAssault:
      score = bcd3(0x80, 0x81, 0x82);
      lives = at(0xE5);
      over = lives == 0;
      break;
    case kAsterix:
      score = bcd3(0xDE, 0xDF, 0xE0);
      lives = at(0xD3) & 15;
      over = lives == 1 && at(0xC7) == 1;
      break;
    case kAsteroids:
      score = bcd(at(0xBD)) * 1000 + bcd(at(0xBE)) * 10;
      lives = at(0xBC) >> 4;
      over = lives == 0;
      reward = rise_of_wrapped(100000);
      break;
    case kAtlantis:
      score = bcd(at(0xA1)) * 1000000 + bcd(at(0xA3)) * 10000 + bcd(at(0xA2)) * 100;
      lives = at(0xF1);
      over = lives == 0xFF;
      if (over) reward = 0;
      break;
    case kAtlantis2:
      score = bcd3(0xA3, 0xA2, 0xA1);
      lives = at(0xF1);
      over = lives == 0xFF;
      if (over) reward = 0;
      break;
    case kBackgammon: {
      // Points, bars and homes; one side's checkers count up, the other's down, in 8 bits as in ALE.
      uint8_t up = 0, down = 0;
      for (int place = 0x80; place <= 0x9B; ++place) {
        uint8_t& side = static_cast<int8_t>(at(place)) > 0 ? up : down;
        side = static_cast<uint8_t>(side + at(place));
      }
      const bool is_whole = up == 15 && down == 0xF1;
      if (is_whole) score = at(0x80) == 0xF1 ? 1 : at(0x8E) == 15 ? -1 : 0;
      over = score != 0;
      break;
    }
    case kBankHeist:
      score = bcd3(0xD8, 0xD9, 0xDA);
      lives = at(0xD5);
      over = lives == 0 && at(0xCE) == 1;
      break;
    case kBasicMath:
      score = bcd(at(0x84));
      over = at(0x86) != 0;
      break;
    case kBattleZone:
      score = (10 * digit_or_blank(at(0x9E) >> 4) + digit_or_blank(at(0x9E))) * 10000 +
              digit_or_blank(at(0x9D) >> 4) * 1000;
      lives = at(0xBA) & 15;
      over = lives == 0;
      break;
    case kBeamRider:
      score = bcd3(0x8B, 0x8A, 0x89);
      lives = at(0x85) + 1;
      if (lives == tally.lives - 1 && at(0x8C) != 1) lives = tally.lives;
      over = at(0x85) == 0xFF;
      break;
    case kBerzerk:
      score = bcd3(0xDD, 0xDE, 0xDF);
      lives = at(0xDA) + 1;
      over = at(0xDA) == 0xFF;
      break;
    case kBlackjack:
      score = bcd2(0x86, 0x89);
      over = score >= 1000;
      if (at(0x86) == 0x0B && at(0x89) == 0xBB) score = 0;  // blanks: the player is bankrupt
      break;
    case kBowling:
      score = bcd2(0xA6, 0xA1);
      over = at(0xA4) > 0x10;
      break;
    case kBoxing: {
      const int own = at(0x92) == 0xC0 ? 100 : bcd(at(0x92)), other = at(0x93) == 0xC0 ? 100 : bcd(at(0x93));
      score = own - other;
      over = own == 100 || other == 100 || ((at(0x90) & 0xF0) == 0 && at(0x91) == 0);
      break;
    }
    case kBreakout:
      score = (at(0xCC) & 15) * 100 + bcd(at(0xCD));
      lives = at(0xB9);
      tally.started |= lives == 5;
      over = lives == 0 && tally.started;
      break;
    case kCarnival:
      score = bcd(at(0xAD)) * 1000 + bcd(at(0xAE)) * 10;
      over = at(0x83) == 0;
      break;
    case kCasino:
      score = bcd2(0x8C, 0x95);
      if (at(0xD4) == 3) {  // the fourth of its games
        over = at(0x9E) == 0xAA;
      } else {
        over = score == 0 || (at(0x9E) != 0 && at(0xD3) & 0x80);
      }
      if (at(0xD4) != 3 && at(0xD3) & 0x80) reward = tally.reward;  // ALE repeats the last frame's
      break;
    case kCentipede:
      score = bcd3(0xF4, 0xF5, 0xF6);
      lives = (at(0xED) >> 4 & 7) + 1;
      over = at(0xA6) & 0x40;
      reward = rise_or_0();
      break;
    case kChopperCommand:
      score = bcd(at(0xEC)) * 10000 + bcd(at(0xEE)) * 100;
      lives = at(0xE4) & 15;
      over = lives == 0;
      break;
    case kCrazyClimber:
      score = at(0x85) * 100000 + at(0x84) * 10000 + at(0x83) * 1000 + at(0x82) * 100;
      lives = at(0xAA);
      over = lives == 0;
      reward = rise_or_0();
      break;
    case kCrossbow:
      score = bcd3(0x8B, 0x8C, 0x8D);
      over = at(0xE7) == 0x82;
      break;
    case kDarkchambers:
      score = bcd2(0xCF, 0xCC) * 10;
      over = (at(0xCA) & 0x1F) == 0;
      if (at(0xD5) < tally.previous || score < tally.score) {
        over = true;
        score = tally.score;
      }
      tally.previous = at(0xD5);
      break;
    case kDefender:
      for (int i = 5; i >= 0; --i) score = score * 10 + digit_or_blank(at(0x9C + i));
      lives = at(0xC2);
      over = lives == 0;
      break;
    case kDemonAttack:
      score = bcd3(0x81, 0x83, 0x85);
      if (at(0x81) == 0xAB && at(0x83) == 0xCD && at(0x85) == 0xEA) score = 0;  // while it boots
      lives = at(0xF2) + 1;
      over = at(0xF2) == 0 && at(0xF1) == 0xBD;
      break;
    case kDonkeyKong:
      score = bcd2(0x87, 0x88) * 100;
      lives = at(0xA3);
      over = lives == 0 && at(0x8B) == 0x1F && at(0x8F) == 3;
      break;
    case kDoubleDunk:
      score = bcd(at(0xF6)) - bcd(at(0xF7));
      over = (bcd(at(0xF6)) >= 24 || bcd(at(0xF7)) >= 24) && at(0xFE) == 0xE7;
      break;
    case kEarthworld:
      score = bcd(at(0xA7));
      over = score == 10;
      break;
    case kElevatorAction:
      score = bcd3(0x87, 0x88, 0x89);
      lives = at(0x83);
      over = lives == 0 && at(0x81) != 0;
      break;
    case kEnduro:
      if (at(0xAD) != 0) score = 200 + 300 * (at(0xAD) - 1) - bcd2(0xAC, 0xAB);
      over = at(0xAF) == 0xFF;
      break;
    case kEntombed:
      score = at(0xE3);
      over = (at(0xC7) & 3) == 0;
      break;
    case kEt:
      score = bcd3(0xDF, 0xE0, 0xE1);
      lives = static_cast<int8_t>(at(0xE5) + 1);
      over = at(0xE5) == 0xFF && at(0x80) == 8;
      break;
    case kFishingDerby:
      score = bcd(at(0xBD)) - bcd(at(0xBE));
      over = at(0xBD) == 0x99 || at(0xBE) == 0x99;
      break;
    case kFlagCapture:
      score = bcd(at(0xEA));
      over = at(0xEB) == 0;
      break;
    case kFreeway:
      score = bcd(at(0xE7));
      over = at(0x96) == 1;
      reward = rise() > 1 ? 1 : rise_or_0();
      break;
    case kFrogger:
      score = bcd2(0xCC, 0xCE);
      lives = at(0xD0);
      over = lives == 0xFF;
      break;
    case kFrostbite:
      score = bcd3(0xC8, 0xC9, 0xCA);
      lives = (at(0xCC) & 15) + 1;
      over = (at(0xCC) & 15) == 0 && at(0xF1) & 0x80;
      break;
    case kGalaxian:
      score = bcd3(0xAC, 0xAD, 0xAE);
      lives = at(0xB9) + 1;
      over = at(0xBF) & 0x80;
      reward = rise_of_wrapped(1000000);
      break;
    case kGopher:
      score = bcd3(0xB0, 0xB1, 0xB2);
      lives = (at(0xB4) & 1) + (at(0xB4) >> 1 & 1) + (at(0xB4) >> 2 & 1);
      over = lives == 0;
      break;
    case kGravitar:
      score = bcd3(0x87, 0x88, 0x89);
      lives = at(0x81) == 0 ? 6 : at(0x84) + 1;
      over = at(0x81) == 1;
      break;
    case kHangman:
      score = bcd(at(0xEB)) - bcd(at(0xEC));
      over = score != 0 || (at(0xF1) == 0 && tally.previous == 0xFF);
      tally.previous = at(0xF1);
      break;
    case kHauntedHouse:
      score = at(0x99) == 0x44 ? 100 : 0;  // it has been won
      lives = at(0x96);
      over = lives == 0 || score != 0;
      reward = rise() - (bcd(at(0x82)) != bcd(tally.previous));
      tally.previous = at(0x82);
      break;
    case kHero:
      score = bcd3(0xB7, 0xB8, 0xB9);
      lives = at(0xB3);
      over = lives == 0;
      break;
    case kHumanCannonball:
      score = bcd(at(0xB6));
      over = at(0xB6) == 7 || at(0xB7) == 7;
      break;
    case kIceHockey:
      score = bcd(at(0x8A)) - bcd(at(0x8B));
      over = at(0x86) == 0 && at(0x87) == 0;
      if (rise() > 1) reward = 1;
      break;
    case kJamesbond:
      score = bcd3(0xDE, 0xDD, 0xDC);
      lives = (at(0x86) & 15) + 1;
      over = lives == 1 && at(0x8C) == 0x68;
      break;
    case kJourneyEscape:
      score = bcd3(0x90, 0x91, 0x92);
      over = at(0x95) == 0 && at(0x96) == 0;
      if (rise() == 50000) reward = 0;
      break;
    case kKaboom:
      score = bcd3(0xA3, 0xA4, 0xA5);
      lives = 1;
      over = at(0xA1) == 0 || score == 999999;
      break;
    case kKangaroo:
      score = bcd2(0xA7, 0xA8) * 100;
      lives = (at(0xAD) & 7) + 1;
      over = at(0xAD) == 0xFF;
      break;
    case kKeystoneKapers:
      score = bcd2(0x9B, 0x9C);
      lives = at(0x96);
      over = lives == 0 && at(0x88) == 0;
      break;
    case kKingKong:
      score = bcd2(0x82, 0x83);
      lives = at(0xEE);
      over = lives == 0;
      break;
    case kKlax: {
      ram = cart_ram;
      score = bcd3(0xB6, 0xB5, 0xB4);
      bool is_full = at(0xA8) == 4;
      for (int cell = 0xB3; cell <= 0xCB; ++cell) {
        const uint8_t tile = at(cell);
        is_full &= tile != 0 && tile != 2 && tile != 6 && tile != 10 && tile != 14;
      }
      over = at(0x9D) == 0x99 || (at(0xE9) != 0 && at(0xE9) == at(0xEE)) || is_full;
      break;
    }
    case kKoolaid:
      score = bcd2(0x80, 0x81) * 100;
      over = at(0xD1) == 0x80;
      break;
    case kKrull:
      score = bcd3(0x9C, 0x9D, 0x9E);
      lives = (at(0x9F) & 7) + 1;
      over = at(0x9F) == 0 && at(0xA2) == 3 && at(0x80) == 0x80;
      break;
    case kKungFuMaster:
      score = bcd3(0x98, 0x99, 0x9A);
      lives = (at(0x9D) & 7) + 1;
      over = at(0x9D) == 0xFF;
      break;
    case kLaserGates:
      score = bcd3(0x80, 0x81, 0x82);
      over = at(0x83) == 0;
      break;
    case kLostLuggage:
      score = bcd3(0x94, 0x95, 0x96);
      lives = at(0xCA);
      over = lives == 0 && at(0xC8) == 0x0A && at(0xA5) == 0 && at(0xA9) == 0;
      break;
    case kMarioBros:
      score = bcd2(0x89, 0x8A) * 100;
      lives = at(0x87);
      over = lives == 0;
      break;
    case kMiniatureGolf:
      tally.score = 0;
      if (bcd(at(0xAF)) != bcd(tally.previous) && tally.points) {  // the next hole
        score = bcd(tally.par) - tally.points;
        tally.points = 0;
      }
      tally.previous = at(0xAF);
      if (at(0x88)) {
        tally.par = at(0x88);
      } else {  // the ball is in the hole
        const int strokes = bcd(at(0x87)) - bcd(tally.strokes);
        tally.points += strokes < 0 ? bcd(at(0x87)) : strokes;
        if (tally.points > kMostPoints) tally.points = kMostPoints;
        tally.strokes = at(0x87);
      }
      over = at(0xAF) == 0;
      break;
    case kMontezumaRevenge:
      score = bcd3(0x93, 0x94, 0x95);
      lives = (at(0xBA) & 7) + 1;
      over = at(0xBA) == 0 && at(0xFE) == 0x60;
      break;
    case kMrDo:
      score = bcd2(0x83, 0x82) * 10;
      lives = at(0xDB);
      over = at(0xDA) == 0x40;
      break;
    case kMsPacman:
      score = bcd3(0xFA, 0xF9, 0xF8);
      lives = (at(0xFB) & 7) + 1;
      over = (at(0xFB) & 15) == 0 && at(0xA7) == 0x53;
      break;
    case kNameThisGame:
      score = bcd3(0xC4, 0xC5, 0xC6);
      lives = at(0xC7) & 7;
      over = lives == 0;
      break;
    case kOthello:
      score = bcd(at(0xCE)) - bcd(at(0xD0));
      tally.rested = at(0xC0) ? 0 : tally.rested < kMostRested ? tally.rested + 1 : kMostRested;
      over = tally.rested == kMostRested;
      break;
    case kPacman:
      score = bcd3(0xD0, 0xCE, 0xCC);
      lives = at(0x98) + 1;
      over = at(0x98) == 0 && at(0xE4) == 0x3F;
      break;
    case kPhoenix:
      score = bcd2(0xC9, 0xC8) * 100 + (at(0xC7) >> 4) * 10;
      lives = at(0xCB) & 7;
      over = at(0xCC) == 0x80;
      break;
    case kPitfall:
      score = bcd3(0xD5, 0xD6, 0xD7);
      lives = (at(0x80) & 0xF0) == 0xA0 ? 3 : (at(0x80) & 0xF0) == 0x80 ? 2 : 1;
      over = (at(0x80) & 0xF0) == 0 && at(0x9E) != 0;
      break;
    case kPong:
      score = at(0x8E) - at(0x8D);
      over = at(0x8D) == 21 || at(0x8E) == 21;
      break;
    case kPooyan:
      score = bcd3(0x88, 0x89, 0x8A);
      lives = (at(0x96) & 7) + 1;
      over = at(0x96) == 0 && at(0x98) == 5;
      break;
    case kPrivateEye:
      score = bcd3(0xC8, 0xC9, 0xCA);
      over = at(0xC2) > 1;
      break;
    case kQbert:
      score = bcd3(0xD9, 0xDA, 0xDB);
      // An extra life raises the byte and not the count, so that a death after it has to be seen as a change.
      if (static_cast<int8_t>(at(0x88)) == static_cast<int8_t>(tally.previous) - 1) --lives;
      over = at(0x88) == 0xFE || (at(0x88) == 2 && tally.previous == 0xFF);
      tally.previous = at(0x88);
      if (over) reward = 0;
      break;
    case kRiverraid:
      for (int i = 0xCD; i <= 0xD7; i += 2) score = score * 10 + riverraid_digit(at(i));
      lives = at(0xC0) == 0x58 ? 4 : at(0xC0) == 0x59 ? 1 : at(0xC0) / 8 + 1;
      over = at(0xC0) == 0x58 && tally.previous == 0x59;
      tally.previous = at(0xC0);
      break;
    case kRoadRunner:
      for (int i = 0xCC; i >= 0xC9; --i) score = score * 10 + digit_or_blank(at(i));
      score *= 100;
      lives = (at(0xC4) & 7) + 1;
      over = lives == 1 && (at(0xB9) != 0 || at(0xBD) != 0);
      break;
    case kRobotank:
      score = at(0xB6) * 12 + at(0xB5);
      lives = (at(0xA8) & 15) + 1;
      over = at(0xA8) == 0 && at(0xB4) == 0xFF;
      break;
    case kSeaquest:
      score = bcd3(0xB8, 0xB9, 0xBA);
      lives = at(0xBB) + 1;
      over = at(0xA3) != 0;
      break;
    case kSirLancelot:
      score = bcd3(0x9E, 0x9F, 0xA0);
      lives = at(0xA9);
      over = lives == 0 && at(0xA7) == 0xA0;
      break;
    case kSkiing:
      score = -(at(0xE8) * 6000 + bcd2(0xE9, 0xEA));
      over = at(0x91) == 0xFF;
      break;
    case kSolaris:
      score = bcd3(0xDE, 0xDD, 0xDC) * 10;
      lives = at(0xD9) & 15;
      over = at(0xD9) == 0;
      break;
    case kSpaceInvaders:
      score = bcd2(0xE6, 0xE8);
      lives = at(0xC9);
      over = lives == 0 || at(0x98) & 0x80;
      reward = rise_of_wrapped(10000);
      break;
    case kSpaceWar:
      score = bcd(at(0xA7));
      over = score == 10 || at(0x80) == 0;
      break;
    case kStarGunner:
      for (int i = 0x86; i >= 0x83; --i) score = score * 10 + digit_or_blank(at(i));
      score *= 100;
      tally.started |= at(0x87) == 5;
      lives = tally.started ? at(0x87) & 15 : 5;
      tally.previous |= at(0x87);
      over = at(0x87) == 0 && tally.previous;
      break;
    case kSuperman:
      over = at(0x80) == 0xAC && at(0x81) == 0xF2 && at(0x9F) & 0x40;  // it has been won
      if (over) score = 5999 - bcd(at(0xE3)) * 60 - bcd(at(0xE2));
      break;
    case kSurround:
      score = bcd(at(0xF7)) - bcd(at(0xF6));
      over = bcd(at(0xF6)) == 10 || bcd(at(0xF7)) == 10;
      break;
    case kTennis: {
      const int own = at(0xC7), other = at(0xC8);
      score = own - other;
      over = own == 7 || other == 7 || (own >= 6 && score >= 2) || (other >= 6 && score <= -2);
      const int points = at(0xC5) - at(0xC6);
      if (rise() == 0) reward = points - tally.points;
      tally.points = points;
      break;
    }
    case kTetris:
      score = bcd2(0xF2, 0xF1);
      over = at(0xF3) & 0x80;
      reward = rise_or_0();
      break;
    case kTicTacToe3d: {
      const bool is_decided = at(0xFE) == 0x10 && at(0xFF) == 0xF3;  // a return address on the stack
      if (is_decided) score = at(0xE1) == 8 ? 1 : -1;
      bool is_full = true;
      for (int cell = 0x9A; cell <= 0xD9; ++cell) is_full &= at(cell) != 0;
      over = is_decided || is_full;
      break;
    }
    case kTimePilot:
      score = bcd2(0x8F, 0x8D) * 100;
      if ((at(0x80) & 15) == 2) lives = (at(0x8B) & 7) + 1;
      over = at(0xA0) != 0;
      break;
    case kTrondead:
      score = bcd3(0xBD, 0xBE, 0xBF);
      lives = 5 - at(0xC8);
      over = lives == 0;
      break;
    case kTurmoil:
      score = (bcd2(0x8A, 0x89) + at(0xD3)) * 10;
      lives = at(0xB9);
      over = lives == 0 && at(0xC5) == 1;
      break;
    case kTutankham:
      score = bcd2(0x9A, 0x9C);
      lives = at(0x9E) & 3;
      over = at(0x9E) == 0;
      break;
    case kUpNDown:
      score = bcd3(0x80, 0x81, 0x82);
      lives = (at(0x86) & 15) + 1;
      over = lives == 1 && at(0x94) > 0x40;
      break;
    case kVenture:
      score = bcd2(0xC7, 0xC8) * 100;
      lives = (at(0xC6) & 7) + 1;
      over = at(0xC6) == 0 && at(0xCD) == 0xFF && at(0xBF) & 0x80;
      break;
    case kVideoCheckers: {
      bool has_own = false, has_other = false;
      for (int square = 0x80; square <= 0xA2; ++square) {
        if (square == 0x88 || square == 0x91 || square == 0x9A) continue;  // between two rows of the board
        has_own |= at(square) == 0x10 || at(square) == 0x20;
        has_other |= at(square) == 0x90 || at(square) == 0xA0;
      }
      over = !has_own || !has_other;
      score = !has_own ? -1 : !has_other ? 1 : 0;
      break;
    }
    case kVideoChess:
      over = at(0xE1) == 0x82 && at(0xEE) < 2;
      if (over) score = at(0xEE) == 0 ? 1 : -1;
      break;
    case kVideoCube:
      for (int face = 0xA0; face < 0xD6; face += 9) {
        bool is_uniform = true;
        for (int i = 1; i < 9; ++i) is_uniform &= at(face + i) == at(face);
        score += is_uniform;
      }
      over = score == 6;
      if (at(0xDB) == 0 && tally.previous == 0xFF) {  // the time is over
        reward = -1;
        over = true;
      }
      tally.previous = at(0xDB);
      break;
    case kVideoPinball:
      score = bcd3(0xB4, 0xB2, 0xB0);
      lives = 4 - (at(0x99) & 7) + (at(0xA8) & 1);
      over = at(0xAF) & 1;
      break;
    case kWizardOfWor:
      score = bcd2(0x88, 0x86) * 100;
      if (score >= 800000) score -= 800000;
      if ((at(0xD7) & 1) == 0) lives = at(0x8D) & 15;
      over = (at(0x8D) & 15) == 0 && at(0xF4) == 0xF8;
      break;
    case kWordZapper:
      score = at(0xCF) == 0 ? tally.score : -static_cast<int8_t>(at(0xDC));
      over = at(0xCF) != 0 && (at(0xDC) == 0xFF || at(0xDE) == 0);
      if (at(0xCF) == 0) reward = tally.reward;  // ALE repeats the last frame's
      break;
    case kYarsRevenge:
      score = bcd3(0xE0, 0xE1, 0xE2);
      lives = at(0x9E) >> 4;
      over = lives == 0;
      break;
    case kZaxxon:
      score = bcd2(0xE8, 0xE9) * 100;
      lives = at(0xEA) & 7;
      over = lives == 0;
      break;
  }
  tally.reward = reward == kRise ? rise() : reward;
  tally.score = score;
  tally.lives = static_cast<int16_t>(lives);
  tally.shown_lives = over && !keeps_lives ? 0 : tally.lives;
  tally.over = over;
}

}  // namespace beast::atari
